"""The page that draws all tables of accuracy together, for somebody who must choose."""
