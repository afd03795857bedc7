"""`resilin run --live`: a launcher whose workers keep running when others come and go."""
