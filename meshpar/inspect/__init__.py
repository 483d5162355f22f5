"""The compiled program read back: what it sends, what it holds, what it computes.

traced step ─► program (here) or pod (GPUs that are not here) ─► text ─► hlo: Module
      Module ─► census: collectives ─► promise: what the strategy said ─► holding: kept, missing, unexpected
             ─► work: FLOPs, temporaries ─► memory: does it fit, and what would
             ─► roofline, timeline: the step simulated ─► prediction: overlap, bound
             ─► lint: costly mistakes
      explain: all of it as one Report ─► render, budget, against, command
"""
