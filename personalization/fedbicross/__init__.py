"""FedBiCross in torch: clustering, inversion, distillation between clusters, and personalization.

Xia et al., FedBiCross, arXiv 2601.01901. What the paper calls a stage is one or two modules here:

    clustering    Stage 1: which hospitals' models go together
    inversion     Stage 2a: images that a cluster's models know, and their losses
    teachers      Stage 2b: a cluster's models as one teacher, plain and adapted to noise
    distillation  Stage 2c: what a student learns from both
    bilevel       Stage 2c: how much every cluster's knowledge counts, by an exact outer gradient
    synthesis     Stage 2 as a whole, online: step by step, forgetting each step's images
    personal      Stage 3: a hospital's own model, from its cluster's and its private data
    picking       beyond the paper: which cluster suits a hospital from outside, without labels
    picking_gate  whether such a pick may serve
"""
