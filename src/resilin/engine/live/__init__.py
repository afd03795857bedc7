"""The live engine: members come and go, and whoever stays keeps its process."""
