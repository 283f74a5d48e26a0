"""Validation of `actmat tune`: is the merge that unlabeled inputs choose the best one on the test data?"""
