"""What a site does with its own data: training, batch-norm statistics, answers and scores."""
