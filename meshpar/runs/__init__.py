"""Training runs: recipes, run folders, the course of a run, and reading finished runs."""
