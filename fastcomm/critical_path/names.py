"""Names of calls that mean something to the critical path, as data: of CUDA and HIP."""

# Calls that take the lock of their process. Nsight Systems appends a version to names.
_VERSION = r"(_v\d+)?(_ptsz|_ptds)?$"
LOCKED = (
    r"^(cudaHostAlloc|hipHostMalloc|cudaLaunchKernel(ExC)?|cuLaunchKernel(Ex)?"
    r"|cudaLaunchCooperativeKernel|cudaGraphLaunch|cuGraphLaunch"
    r"|hip(Ext)?(Module)?LaunchKernel|hipGraphLaunch"
    r"|(cuda|hip)Mem(cpy|set)Async)" + _VERSION
)
# Calls that return when what was launched before has ended.
WAITS_FOR_DEVICE = r"^(cuda|hip)(Device|Thread)Synchronize|^cuCtxSynchronize"
WAITS_FOR_STREAM = r"^(cuda|hip|cu)StreamSynchronize"
WAITS_FOR_EVENT = r"^(cuda|hip|cu)EventSynchronize"
# Copies that return when they are done.
COPIES = r"^(cudaMemcpy|hipMemcpy|hipMemcpyWithStream|cuMemcpy[DHA]to[DHA])(_v\d+)*(_ptds)?$"
# Work that its call waits for, whatever the call is named.
WAITED_FOR = r"DtoH.*Pageable"

RECORDS = r"^(cuda|hip|cu)EventRecord"
STREAM_WAITS = r"^(cuda|hip|cu)StreamWaitEvent"
