"""What a site does with its own data: loading, training, batch-norm statistics, answers and scores."""
