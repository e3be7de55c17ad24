"""Does a lens before the network help a hospital from outside?"""
