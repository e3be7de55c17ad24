"""IOP-FL inside the federation: global and personal models at their own sites."""
