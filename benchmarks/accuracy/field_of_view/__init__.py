"""Does a network that sees slices larger help a hospital with a wider field of view?"""
