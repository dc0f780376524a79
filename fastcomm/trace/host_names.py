"""Names of calls, operators and annotations of the host, by what they mean.

Most are regular expressions to search for. Those that look alike and answer different questions
stand side by side.
"""

# Libraries of collectives on the host and on devices; their annotations: "gloo:all_reduce".
HOST_LIBRARIES = ("gloo", "mpi", "ucc")
DEVICE_LIBRARIES = ("nccl", "xccl", "hccl")
HOST_ANNOTATION = rf"^(?:{'|'.join(HOST_LIBRARIES)}):(\w+)"
DEVICE_ANNOTATION = rf"^(?:{'|'.join(DEVICE_LIBRARIES)}):"
# PyTorch's call of a collective, with its metadata.
COLLECTIVE_CALL = "record_param_comms"
# Beginnings of names of host events that tell the collective of a launch, however short.
COLLECTIVE_PREFIXES = (COLLECTIVE_CALL, "c10d::", "nccl:", "gloo:")

_FUNCTIONAL = r"_?c10d_functional(?:_autograd)?::"
# Operators of torch.distributed: they enqueue a collective or wait for one, without computing.
DISTRIBUTED_OPERATOR = rf"^(?:c10d::|{_FUNCTIONAL})"
# The one that waits for a functional collective.
WAIT_TENSOR = rf"^{_FUNCTIONAL}wait_tensor$"
# Those in which a thread waits, in a run without an accelerator.
WAITING_ON_HOST = rf"^c10d::(?:send|recv|barrier)|{WAIT_TENSOR}"
# Those of DTensor, of which tensor parallel layers are made, begin with this.
DTENSOR_PREFIX = "_c10d_functional::"
# Ranges that annotate a wait of the host for other ranks, functions of Python among them.
WAITING = (
    r"(?i)\bbarrier\b|_distributed_c10d\.Work|wait_tensor|recv_(?:forward|backward)"
    rf"|wait_for_(?:recv|send|message)|{HOST_ANNOTATION}"
)
# The name of an event that is made up for the time in which a thread waits for a collective.
COLLECTIVE_WAIT = "wait for a collective"

# Calls of any runtime in which a host thread is blocked or polls: its time is no other work.
SYNCHRONIZING = (
    r"(?i)synchronize|(?:Memcpy|Memset)(?!.*Async)(?!.*Peer)(?!Batch)|(?:Event|Stream)Query"
    r"|StreamWaitValue|waitFor(?:Event|Queue)|queue.?finish|zeCommandQueueSynchronize"
)
# Calls that return when work launched before has ended, which constrains their end: all work of
# a device or a stream, work before an event, or a collective of the host.
WORK_WAIT = (
    r"^(?:cuda|hip)(?:Device|Thread)Synchronize|^cuCtxSynchronize"
    r"|^(?:cuda|hip|cu)(?:Stream|Event)Synchronize"
    rf"|^{COLLECTIVE_WAIT}$|{WAIT_TENSOR}"
)
# Calls that return when their copy has ended.
COPY_WAIT = (
    r"^(?:cudaMemcpy|hipMemcpy|hipMemcpyWithStream|cuMemcpy[DHA]to[DHA])(?:_v\d+)*(?:_ptds)?$"
)

GRAPH_LAUNCH = "GraphLaunch"
# Calls of any runtime that launch or enqueue something: their time is the cost of launching.
LAUNCHING = r"(?i)launch|enqueue|AppendMemoryCopy"
# Calls of CUDA and HIP that always start device work; a copy or memset of nothing does not.
KERNEL_LAUNCH = r"Launch(?:Cooperative|Ext)?Kernel"
WORK_LAUNCH = rf"{KERNEL_LAUNCH}|{GRAPH_LAUNCH}"
COPY_CALL = r"^(?:cuda|hip|cu)Mem(?:cpy|set)"
# Calls of CUDA and HIP that take the lock of the process, so that threads do them in turns.
# Nsight Systems appends a version to names.
LOCKING_CALL = (
    r"^(?:cudaHostAlloc|hipHostMalloc|cudaLaunchKernel(?:ExC)?|cuLaunchKernel(?:Ex)?"
    r"|cudaLaunchCooperativeKernel|(?:cuda|cu|hip)GraphLaunch"
    r"|hip(?:Ext)?(?:Module)?LaunchKernel|(?:cuda|hip)Mem(?:cpy|set)Async)"
    r"(?:_v\d+)?(?:_ptsz|_ptds)?$"
)
