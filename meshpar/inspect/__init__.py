"""Analysis of compiled training steps: communication, memory and compute.

traced step ─► program (local devices) or pod (remote GPUs) ─► text ─► hlo: Module
      Module ─► census: collectives ─► expected: collectives of the strategy ─► matching: matched, missing, unexpected
             ─► program_work: FLOPs, temporaries ─► memory: peak, and remedies if it does not fit
             ─► timeline: simulated step ─► overlap, bound
             ─► lint: performance mistakes
      explain: all results as a Report ─► render, budget, comparison
"""
