"""A table of measured expert all-to-alls, as `dispatch evaluate` reads it."""

EXCHANGES = """\
mode,nodes,ranks,hidden,topk,experts,tokens,sms,dispatch_us,combine_us
normal,1,8,7168,8,256,4096,24,498,961
low_latency,2,16,7168,8,256,128,0,101,
"""
