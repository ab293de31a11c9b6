"""Several engines behind one door: which of them a request goes to, and the door itself, on Ray Serve.

router, routed_blocks   the ranking of replicas, and the blocks that each is taken to have
block_digest            the blocks of an engine, as it reports them
route_table             the door's facts, and its open requests
prompt_keys             the keys of a prompt's blocks, before a replica has seen it
door                    one API over the replicas           router_metrics   the door's metrics
replica_group           requests to replicas, lost ones     prefills         prompts computed apart
replica_server          an engine with the whole API, reached by calls
cluster_settings        the arguments of a cluster          scaling          how many replicas
serve_app, serve_router, serve_control   the same on Ray Serve: the only modules that import ray

Others may use
    router                              the ranking of replicas for a request, a pure function
    routed_blocks                       the blocks that each replica is taken to have
    simulated_routing                   the ranking as the routing of a simulation
    cluster_settings, serve_control     a cluster's settings; its start, status and end
"""
