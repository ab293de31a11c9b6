"""Several engines behind one door: which of them a request goes to.

Others may use
    router             the ranking of replicas for a request, a pure function
    routed_blocks      the blocks that each replica is taken to have: its digest, and what was sent there lately
    simulated_routing  the ranking as the routing of a simulation
"""
