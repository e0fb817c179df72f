"""Key-Value Means attention: the operator (`attention.kvm_attention`) and the mixer around it."""
