"""Rules that divide a cluster among jobs, each a pure function of its status."""
