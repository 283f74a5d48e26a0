"""Records of a merge: manifest, model card, verification, comparison, pages."""
