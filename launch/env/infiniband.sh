# NCCL over InfiniBand on NVIDIA GPUs; sourced by launch/slurm.sbatch with FABRIC=infiniband. Not measured on a fabric.
# NCCL finds cards, paths, protocols and channels itself; what it chooses well is not set here.

# A subnet manager that reroutes around a failed link takes seconds; 4.096 us * 2^22 = 17 s per try, NCCL's own 20 is 4 s.
export NCCL_IB_TIMEOUT=22

# Say once what NCCL has chosen wrongly or could not use; costs nothing while all is well.
export NCCL_DEBUG=WARN

# Only if this site needs it:
# export NCCL_IB_HCA=^mlx5_bond_0     the storage or management card is InfiniBand too and must not carry gradients
# export NCCL_IB_SL=1                 the administrator keeps a service level for this traffic
# export NCCL_COLLNET_ENABLE=1        SHARP: reduces in the switches; wants NVIDIA's plugin and the administrator's leave
