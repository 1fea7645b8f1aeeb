# NCCL over RoCE v2 on NVIDIA GPUs; sourced by launch/slurm.sbatch with FABRIC=roce. Not measured on a fabric.
# NCCL finds cards, paths, protocols and channels itself, and from 2.21 on the GID of RoCE v2, too.

# The class of traffic that the switches keep lossless. NCCL's 0 is best effort: packets are dropped when many nodes send
# to one, and every drop stalls all ranks. 104 is DSCP 26, a common choice; ask for the one of this site (DSCP * 4).
export NCCL_IB_TC=${NCCL_IB_TC:-104}

# Ethernet switches choose an uplink per flow, by a hash; NCCL makes one flow per pair of cards, and two on one uplink
# halve both. Four flows spread better.
export NCCL_IB_QPS_PER_CONNECTION=4

# Routes settle in seconds after a link fails; 4.096 us * 2^22 = 17 s per try, NCCL's own 20 is 4 s.
export NCCL_IB_TIMEOUT=22

# Say once what NCCL has chosen wrongly or could not use; costs nothing while all is well.
export NCCL_DEBUG=WARN

# Only if this site needs it:
# export NCCL_IB_HCA=^mlx5_bond_0     the storage or management card does RDMA too and must not carry gradients
# export NCCL_IB_GID_INDEX=3          NCCL before 2.21: the entry of RoCE v2 over IPv4 in `show_gids`
