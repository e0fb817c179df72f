"""`hybrid launch`: start one recipe on this machine, on hosts of a hostfile, or through Slurm."""
