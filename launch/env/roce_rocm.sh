# RCCL over RoCE v2 on AMD GPUs; sourced by launch/slurm.sbatch with FABRIC=roce_rocm. Not measured on a fabric.
# RCCL reads NCCL's variables and finds cards, paths, protocols and channels itself.

# The class of traffic that the switches keep lossless; 0 is best effort: packets are dropped when many nodes send to one,
# and every drop stalls all ranks. 104 is DSCP 26, a common choice; ask for the one of this site (DSCP * 4).
export NCCL_IB_TC=${NCCL_IB_TC:-104}

# Ethernet switches choose an uplink per flow, by a hash; one flow per pair of cards makes collisions likely.
export NCCL_IB_QPS_PER_CONNECTION=4

# As on InfiniBand: 17 s per try, in which routes settle.
export NCCL_IB_TIMEOUT=22

# Two hardware queues per process instead of four: compute and communication then overlap without being switched about.
export GPU_MAX_HW_QUEUES=2

# Scratch memory that a kernel has needed stays; giving it back and taking it again stalls collectives on MI300X.
export HSA_NO_SCRATCH_RECLAIM=1

# Say once what RCCL has chosen wrongly or could not use.
export NCCL_DEBUG=WARN

# Only if this site needs it:
# export NCCL_IB_GID_INDEX=3          RCCL before ROCm 6.3: the entry of RoCE v2 over IPv4 in `show_gids`; Pollara: 1
# export NCCL_DMABUF_ENABLE=1         RCCL before 2026 sends through host memory where the module peermem is missing
