"""Do the dose by shift, and training with batches of one kind, help a hospital from outside?"""
