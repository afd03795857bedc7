"""The process that carries decisions out, and its journal."""
