/* NUMA nodes: which CPUs are near which memory.  Known where the library was compiled with hwloc.h and libhwloc can be
 * loaded, on machines with more than one node; all others have one.
 *
 * Panels are dealt out: of each expert's, the n-th part belongs to the n-th node, so that any routing keeps all
 * memories busy.  A node's threads pack its panels, which puts new pages into its memory, and multiply them; when none
 * of its own are left, a thread takes those of others. */
#ifndef MOE4_CPU_TOPOLOGY_H
#define MOE4_CPU_TOPOLOGY_H

#include <sched.h>
#include <stdint.h>

enum { MAX_NODES = 64 };

struct topology {
    int32_t n_nodes;                  /* that have CPUs for this process */
    int32_t n_cpus[MAX_NODES];        /* for this process */
    uint8_t node_of_cpu[CPU_SETSIZE]; /* 0 for CPUs that are not for this process */
};

/* The machine's, as far as the calling thread's affinity goes; or one that hwloc makes up from a description such as
 * "numa:2 pu:4", for tests. */
void topology_read(struct topology *topology, const char *synthetic);

/* Of the CPU that runs the calling thread. */
int32_t topology_node_here(const struct topology *topology);

/* Of worker 0 .. width-1, so that each node has as many as its part of the CPUs. */
int32_t topology_node_of_worker(const struct topology *topology, int32_t worker, int32_t width);

/* Keeps the calling thread on a node's CPUs, of those that it may run on; does nothing where there is one node. */
void topology_bind(const struct topology *topology, int32_t node);

/* The first of n_panels that belongs to a node; the next node's ends them. */
static inline int64_t topology_first_panel(int32_t n_nodes, int32_t node, int64_t n_panels)
{
    return n_panels * node / n_nodes;
}

#endif
