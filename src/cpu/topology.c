#include "cpu/topology.h"

#include <stdio.h>
#include <string.h>

#ifdef MOE4_HAS_HWLOC
#include <dlfcn.h>
#include <hwloc.h>
#include <stddef.h>
#endif

static void set_one_node(struct topology *topology, const cpu_set_t *allowed)
{
    *topology = (struct topology){.n_nodes = 1, .n_cpus = {CPU_COUNT(allowed)}};
}

#ifdef MOE4_HAS_HWLOC

/* libhwloc's functions that we want, from the library itself, so that programs do not depend on it. */
struct hwloc {
    void *library;
    typeof(hwloc_topology_init) *init;
    typeof(hwloc_topology_set_components) *set_components;
    typeof(hwloc_topology_set_all_types_filter) *set_filter;
    typeof(hwloc_topology_set_synthetic) *set_synthetic;
    typeof(hwloc_topology_load) *load;
    typeof(hwloc_topology_destroy) *destroy;
    typeof(hwloc_get_obj_by_depth) *object;
    typeof(hwloc_bitmap_isset) *is_set;
};

static const struct {
    const char *name;
    size_t offset;
} hwloc_functions[] = {
    {"hwloc_topology_init", offsetof(struct hwloc, init)},
    {"hwloc_topology_set_components", offsetof(struct hwloc, set_components)},
    {"hwloc_topology_set_all_types_filter", offsetof(struct hwloc, set_filter)},
    {"hwloc_topology_set_synthetic", offsetof(struct hwloc, set_synthetic)},
    {"hwloc_topology_load", offsetof(struct hwloc, load)},
    {"hwloc_topology_destroy", offsetof(struct hwloc, destroy)},
    {"hwloc_get_obj_by_depth", offsetof(struct hwloc, object)},
    {"hwloc_bitmap_isset", offsetof(struct hwloc, is_set)},
};

static int hwloc_open(struct hwloc *hwloc)
{
    *hwloc = (struct hwloc){.library = dlopen("libhwloc.so.15", RTLD_NOW | RTLD_LOCAL)};
    if (!hwloc->library) return 0;
    for (size_t i = 0; i < sizeof hwloc_functions / sizeof *hwloc_functions; i++) {
        void *function = dlsym(hwloc->library, hwloc_functions[i].name);
        if (!function) {
            dlclose(hwloc->library);
            return 0;
        }
        memcpy((char *)hwloc + hwloc_functions[i].offset, &function, sizeof function);
    }
    return 1;
}

/* Nodes with CPUs that are allowed, numbered without gaps. */
static void list_nodes(struct topology *topology, const struct hwloc *hwloc, hwloc_topology_t loaded,
                       const cpu_set_t *allowed)
{
    hwloc_obj_t object;
    *topology = (struct topology){0};
    for (unsigned i = 0; topology->n_nodes < MAX_NODES; i++) {
        if (!(object = hwloc->object(loaded, HWLOC_TYPE_DEPTH_NUMANODE, i))) break;
        int32_t node = topology->n_nodes;
        for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
            if (!CPU_ISSET(cpu, allowed) || !hwloc->is_set(object->cpuset, (unsigned)cpu)) continue;
            topology->node_of_cpu[cpu] = (uint8_t)node;
            topology->n_cpus[node]++;
        }
        topology->n_nodes += topology->n_cpus[node] > 0;
    }
    if (topology->n_nodes == 0) set_one_node(topology, allowed);
}

/* The x86 component would visit each CPU to ask it what the operating system says as well. */
static void read_nodes(struct topology *topology, const char *synthetic, const cpu_set_t *allowed)
{
    struct hwloc hwloc;
    hwloc_topology_t loaded;
    if (!hwloc_open(&hwloc)) return;
    if (hwloc.init(&loaded) == 0) {
        if (hwloc.set_components(loaded, HWLOC_TOPOLOGY_COMPONENTS_FLAG_BLACKLIST, "x86") == 0 &&
            hwloc.set_filter(loaded, HWLOC_TYPE_FILTER_KEEP_STRUCTURE) == 0 &&
            (!synthetic || hwloc.set_synthetic(loaded, synthetic) == 0) && hwloc.load(loaded) == 0)
            list_nodes(topology, &hwloc, loaded, allowed);
        hwloc.destroy(loaded);
    }
    dlclose(hwloc.library);
}

/* Whether the kernel knows of several; asking hwloc takes milliseconds. */
static int has_several_nodes(void)
{
    char online[64] = "";
    FILE *file = fopen("/sys/devices/system/node/online", "re");
    if (!file) return 0;
    if (!fgets(online, sizeof online, file)) online[0] = '\0';
    fclose(file);
    return strpbrk(online, "-,") != NULL;
}

#endif

void topology_read(struct topology *topology, const char *synthetic)
{
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof allowed, &allowed)) CPU_ZERO(&allowed); /* more CPUs than that: one node */
    set_one_node(topology, &allowed);
#ifdef MOE4_HAS_HWLOC
    if (synthetic || has_several_nodes()) read_nodes(topology, synthetic, &allowed);
#else
    (void)synthetic;
#endif
}

int32_t topology_node_here(const struct topology *topology)
{
    int cpu = topology->n_nodes > 1 ? sched_getcpu() : 0;
    return cpu >= 0 && cpu < CPU_SETSIZE ? topology->node_of_cpu[cpu] : 0;
}

int32_t topology_node_of_worker(const struct topology *topology, int32_t worker, int32_t width)
{
    int64_t n_cpus = 0;
    int32_t node = 0;
    for (int32_t i = 0; i < topology->n_nodes; i++) n_cpus += topology->n_cpus[i];
    int64_t cpu = n_cpus * worker / width;
    while (node < topology->n_nodes - 1 && cpu >= topology->n_cpus[node]) cpu -= topology->n_cpus[node++];
    return node;
}

void topology_bind(const struct topology *topology, int32_t node)
{
    cpu_set_t cpus;
    if (topology->n_nodes == 1 || sched_getaffinity(0, sizeof cpus, &cpus)) return;
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
        if (topology->node_of_cpu[cpu] != node) CPU_CLR(cpu, &cpus);
    if (CPU_COUNT(&cpus)) sched_setaffinity(0, sizeof cpus, &cpus);
}
