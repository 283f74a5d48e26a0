"""Validation of `actmat tune`: is the merge that unlabelled inputs choose the best one on the test data?"""
