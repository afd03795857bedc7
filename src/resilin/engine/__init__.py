"""Who is in the job. Joins whatever launched the process and says how many replicas there are."""
