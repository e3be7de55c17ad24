"""The tables of the four papers, arm by arm, on the shared sets nearest to theirs."""
