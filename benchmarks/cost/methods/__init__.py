"""Costs of the methods: a module builds the two sides of each, `experiment` measures and shows them."""
