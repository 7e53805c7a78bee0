/* SPDX-License-Identifier: Apache-2.0 */
#include "graph_plan.h"

#include "charge.h"
#include "device.h"
#include "pages.h"
#include "real.h"

#define DEPTH 8     /* of nested graphs */
#define BLOCKS 4096u

/* A block that is kept for the graph, in use or not. */
struct block {
	uint64_t bytes;
	CUdeviceptr pointer; /* of the allocation in it; 0: none */
	unsigned on;
};

struct reading {
	struct plan *plan;
	struct block *blocks; /* NULL: no memory */
	unsigned count;
};

static bool device_of(struct plan *plan, CUdevice device, unsigned *on)
{
	for (*on = 0; *on < plan->devices; ++*on)
		if (plan->on[*on].device == device)
			return true;
	if (plan->devices == PLAN_DEVICES)
		return false;
	plan->on[plan->devices].device = device;
	plan->on[plan->devices].leaves = false;
	plan->on[plan->devices++].bytes = 0;
	return true;
}

static void allocates(struct reading *r, CUgraphNode node)
{
	fn_cuGraphMemAllocNodeGetParams *get = REAL(cuGraphMemAllocNodeGetParams);
	CUDA_MEM_ALLOC_NODE_PARAMS p = { .bytesize = 0 };
	struct block *best = NULL;
	CUdevice device;
	unsigned on;
	/* The host's memory is no GPU's. */
	if (get == NULL || get(node, &p) != CUDA_SUCCESS || (device = device_of_location(p.poolProps.location)) < 0 ||
	    !device_of(r->plan, device, &on))
		return;
	uint64_t bytes = (p.bytesize + CHARGE_BLOCK_BYTES - 1) / CHARGE_BLOCK_BYTES * CHARGE_BLOCK_BYTES;
	for (unsigned i = 0; i < r->count; i++) {
		struct block *b = &r->blocks[i];
		if (b->pointer == 0 && b->on == on && b->bytes >= bytes && (best == NULL || b->bytes < best->bytes))
			best = b;
	}
	if (best != NULL) {
		best->pointer = p.dptr;
		return;
	}
	if (__builtin_add_overflow(r->plan->on[on].bytes, bytes, &r->plan->on[on].bytes))
		r->plan->on[on].bytes = UINT64_MAX;
	if (r->blocks != NULL && r->count < BLOCKS)
		r->blocks[r->count++] = (struct block){ bytes, p.dptr, on };
	else
		r->plan->on[on].leaves = true; /* it may */
}

static void frees(struct reading *r, CUgraphNode node)
{
	fn_cuGraphMemFreeNodeGetParams *get = REAL(cuGraphMemFreeNodeGetParams);
	CUdeviceptr pointer = 0;
	if (get == NULL || get(node, &pointer) != CUDA_SUCCESS || pointer == 0)
		return;
	for (unsigned i = 0; i < r->count; i++)
		if (r->blocks[i].pointer == pointer)
			r->blocks[i].pointer = 0;
}

/* NOLINTNEXTLINE(misc-no-recursion): as deep as graphs are nested, up to DEPTH. */
static void read_graph(struct reading *r, CUgraph graph, unsigned depth)
{
	fn_cuGraphGetNodes *get_nodes = REAL(cuGraphGetNodes);
	fn_cuGraphNodeGetType *get_type = REAL(cuGraphNodeGetType);
	fn_cuGraphChildGraphNodeGetGraph *get_child = REAL(cuGraphChildGraphNodeGetGraph);
	size_t count = 0;
	if (depth == DEPTH || get_nodes == NULL || get_type == NULL || get_nodes(graph, NULL, &count) != CUDA_SUCCESS || count == 0 ||
	    count > SIZE_MAX / sizeof(CUgraphNode))
		return;
	size_t size = count * sizeof(CUgraphNode);
	CUgraphNode *nodes = pages_private(size);
	if (nodes == NULL)
		return;
	if (get_nodes(graph, nodes, &count) != CUDA_SUCCESS)
		count = 0;
	for (size_t i = 0; i < count && i < size / sizeof(CUgraphNode); i++) {
		int type = 0;
		CUgraph child = NULL;
		if (nodes[i] == NULL || get_type(nodes[i], &type) != CUDA_SUCCESS)
			continue;
		if (type == CU_GRAPH_NODE_TYPE_MEM_ALLOC)
			allocates(r, nodes[i]);
		else if (type == CU_GRAPH_NODE_TYPE_MEM_FREE)
			frees(r, nodes[i]);
		else if (type == CU_GRAPH_NODE_TYPE_GRAPH && get_child != NULL && get_child(nodes[i], &child) == CUDA_SUCCESS)
			read_graph(r, child, depth + 1);
	}
	pages_unmap(nodes, size);
}

void plan_read(CUgraph graph, struct plan *plan)
{
	struct reading r = { .plan = plan, .blocks = pages_private(BLOCKS * sizeof(struct block)) };
	plan->devices = 0;
	if (graph != NULL)
		read_graph(&r, graph, 0);
	for (unsigned i = 0; i < r.count; i++)
		if (r.blocks[i].pointer != 0)
			plan->on[r.blocks[i].on].leaves = true;
	if (r.blocks != NULL)
		pages_unmap(r.blocks, BLOCKS * sizeof(struct block));
}
