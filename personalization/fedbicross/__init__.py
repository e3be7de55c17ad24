"""FedBiCross in torch: clustering, inversion, distillation between clusters, and personalization.

Xia et al., FedBiCross, arXiv 2601.01901. The modules by the paper's stages:

    clustering    Stage 1: cluster the hospitals' models
    inversion     Stage 2a: losses that turn noise into images which a cluster's models recognise
    teachers      Stage 2b: a cluster's models as one teacher, plain and adapted to noise
    distillation  Stage 2c: loss by which a student learns from both teachers
    bilevel       Stage 2c: weights of the clusters in the distillation, by an exact outer gradient
    synthesis     Stage 2 as a whole, online: each step's images are discarded
    personal      Stage 3: a hospital's own model, from its cluster's model and its private data
    picking       beyond the paper: pick a cluster for an outside hospital without labels

`personalization.gate.picking` decides whether such a pick may be served.
"""
