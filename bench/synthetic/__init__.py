"""A model of the true shape without its weights: a pack and a region of random values that lanes load as any other.

shape     the sizes, from one that a test can run to the true one
walk      the frozen conversation: which token follows which, and where topics change
noise     random words by place, the same on every machine
routing   embedding, head and routers, made so that the model walks the walk and its experts are used unevenly
dense     the dense weights' file
ngram     the n-gram table's file
region    the experts, straight into sealed memory
pack      all of it together
measure   which experts a lane really uses for a stretch of the walk
"""
