"""Merges without data, and the choice by unlabelled inputs, on the suites whose bases were really pretrained."""
