"""`hybrid launch`: one recipe on this machine's processors, on hosts of a hostfile, or through Slurm."""
