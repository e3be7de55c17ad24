"""Which label-free number finds the masks that must be looked at?"""
