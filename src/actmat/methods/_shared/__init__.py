"""What several method files share; the files beside this folder are one method each, and their contract."""
