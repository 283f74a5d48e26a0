"""Results of the suites on pretrained models, and the tables of docs/evidence.md."""
