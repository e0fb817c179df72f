"""The processes of a run: who they are, how they agree, how a lost or silent one is noticed."""
