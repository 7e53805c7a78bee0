/* SPDX-License-Identifier: Apache-2.0 */
/*
 * graph.c: graphs, as far as they allocate and free.
 *
 * An allocation node has an address from its creation on. A launch puts memory behind it, out
 * of blocks that the device keeps for graphs: they stay there, for the next launch, until
 * cuDeviceGraphMemTrim. What a graph allocates and does not free itself lives on after the
 * launch, until somebody frees it. Nodes run in the order in which they were added, which is
 * one that their dependencies allow; other nodes than these two do nothing and take no time.
 */
#include "internal.h"

/* Memory that the device keeps for graphs. */
struct block {
	struct block *next;
	uint64_t handle;
	size_t size;
	bool busy;
};

struct graph_memory {
	struct block *blocks;
	cuuint64_t used, used_high, reserved, reserved_high;
};

/* What an allocation node allocates; held by the node, by instances and while it is live. */
struct place {
	unsigned int holders;
	struct device *dev;
	uintptr_t start;
	size_t asked, size;
	struct block *block; /* while it is live */
	CUgraph graph;       /* that its node is in; only to compare */
};

struct CUgraphNode_st {
	struct CUgraphNode_st *next;
	CUgraphNodeType type;
	struct place *place; /* allocations */
	CUdeviceptr dptr;    /* frees */
	CUgraph child;
	CUDA_MEM_ALLOC_NODE_PARAMS params;
};

struct CUgraph_st {
	struct CUgraph_st *next;
	CUgraphNode first, *last;
	size_t count;
	unsigned int instances;
	bool memory; /* has nodes that allocate or free */
	bool owned;  /* by a node or by a capture */
};

struct step {
	CUgraphNodeType type;
	struct place *place;
	CUdeviceptr dptr;
};

struct CUgraphExec_st {
	struct CUgraphExec_st *next;
	CUgraph graph; /* that it was made of, if that is still there */
	struct step *steps;
	size_t count;
	bool memory, auto_free;
};

static CUgraph graphs;
static CUgraphExec instances;

/* ---- the device's memory for graphs ------------------------------------------------------ */

static struct graph_memory *memory_of(struct device *dev)
{
	if (!dev->graph_memory)
		dev->graph_memory = calloc(1, sizeof(*dev->graph_memory));
	return dev->graph_memory;
}

static CUresult take_block(struct device *dev, size_t size, struct block **out)
{
	struct simgpu_req req = {.op = SIMGPU_OP_ALLOC, .arg = {0, size, SIMGPU_KIND_PHYSICAL}};
	struct graph_memory *m = memory_of(dev);
	struct block *b, *best = NULL;
	struct simgpu_rep rep;
	CUresult ret;

	if (!m)
		return CUDA_ERROR_OUT_OF_MEMORY;
	for (b = m->blocks; b; b = b->next)
		if (!b->busy && b->size >= size && (!best || b->size < best->size))
			best = b;
	if (!best) {
		best = calloc(1, sizeof(*best));
		if (!best)
			return CUDA_ERROR_OUT_OF_MEMORY;
		ret = call(dev, &req, &rep);
		if (ret != CUDA_SUCCESS) {
			free(best);
			return ret;
		}
		best->handle = rep.val[0];
		best->size = size;
		best->next = m->blocks;
		m->blocks = best;
		m->reserved += size;
		if (m->reserved > m->reserved_high)
			m->reserved_high = m->reserved;
	}
	best->busy = true;
	m->used += best->size;
	if (m->used > m->used_high)
		m->used_high = m->used;
	*out = best;
	return CUDA_SUCCESS;
}

static void leave_block(struct device *dev, struct block *b)
{
	b->busy = false;
	dev->graph_memory->used -= b->size;
}

static void trim(struct device *dev)
{
	struct graph_memory *m = dev->graph_memory;
	struct block **at, *b;

	for (at = m ? &m->blocks : NULL; at && (b = *at);) {
		if (b->busy) {
			at = &b->next;
			continue;
		}
		*at = b->next;
		m->reserved -= b->size;
		give_memory(dev, b->handle);
		free(b);
	}
}

EXPORT CUresult cuDeviceGraphMemTrim(CUdevice dev)
{
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	if (device_at(dev))
		trim(device_at(dev));
	else
		ret = CUDA_ERROR_INVALID_DEVICE;
	leave();
	return ret;
}

static CUresult memory_attribute(CUdevice dev, CUgraphMem_attribute attribute, void *value, bool set)
{
	struct graph_memory *m;
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	m = device_at(dev) ? memory_of(device_at(dev)) : NULL;
	if (!device_at(dev)) {
		ret = CUDA_ERROR_INVALID_DEVICE;
	} else if (!value || (unsigned int)attribute > CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH) {
		ret = CUDA_ERROR_INVALID_VALUE;
	} else if (!m) {
		ret = CUDA_ERROR_OUT_OF_MEMORY;
	} else if (!set) {
		const cuuint64_t all[] = {m->used, m->used_high, m->reserved, m->reserved_high};

		*(cuuint64_t *)value = all[attribute];
	} else if (*(cuuint64_t *)value != 0) {
		ret = CUDA_ERROR_INVALID_VALUE; /* the high marks can be reset, no more */
	} else if (attribute == CU_GRAPH_MEM_ATTR_USED_MEM_HIGH) {
		m->used_high = m->used;
	} else if (attribute == CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH) {
		m->reserved_high = m->reserved;
	} else {
		ret = CUDA_ERROR_INVALID_VALUE;
	}
	leave();
	return ret;
}

EXPORT CUresult cuDeviceGetGraphMemAttribute(CUdevice dev, CUgraphMem_attribute attribute, void *value)
{
	return memory_attribute(dev, attribute, value, false);
}

EXPORT CUresult cuDeviceSetGraphMemAttribute(CUdevice dev, CUgraphMem_attribute attribute, void *value)
{
	return memory_attribute(dev, attribute, value, true);
}

/* ---- places ------------------------------------------------------------------------------ */

static struct place *place_new(struct device *dev, size_t size)
{
	struct place *p = calloc(1, sizeof(*p));

	if (!p || size > SIZE_MAX / 2) {
		free(p);
		return NULL;
	}
	p->dev = dev;
	p->asked = size;
	p->size = (size + PAGE - 1) / PAGE * PAGE;
	p->start = (uintptr_t)map_device(p->size, false);
	if (p->start == 0) {
		free(p);
		return NULL;
	}
	p->holders = 1;
	return p;
}

static void place_drop(struct place *p)
{
	if (--p->holders > 0)
		return;
	unmap_device(p->start, p->size);
	free(p);
}

/* The end of a live allocation: its memory goes back to the device's blocks. */
static void place_die(struct place *p)
{
	contents_drop(p->start, p->size);
	leave_block(p->dev, p->block);
	p->block = NULL;
	place_drop(p);
}

static CUresult release(struct range *r)
{
	struct place *p = r->owner;

	range_remove(r);
	place_die(p);
	return CUDA_SUCCESS;
}

static CUresult place_live(struct place *p)
{
	struct range *r;
	CUresult ret = take_block(p->dev, p->size, &p->block);

	if (ret != CUDA_SUCCESS)
		return ret;
	r = range_add(p->start, p->asked, RANGE_GRAPH);
	if (!r) {
		leave_block(p->dev, p->block);
		p->block = NULL;
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	r->dev = p->dev;
	r->owner = p;
	r->release = release;
	p->holders++;
	return CUDA_SUCCESS;
}

/* The device was reset: what graphs hold of it goes. */
void graph_memory_drop(struct device *dev)
{
	struct range *r;

	while ((r = range_of_kind(dev, RANGE_GRAPH)))
		(void)release(r); /* always succeeds */
	trim(dev);
}

/* ---- graphs ------------------------------------------------------------------------------ */

bool graph_is(CUgraph g)
{
	CUgraph x;

	for (x = graphs; x; x = x->next)
		if (x == g)
			return true;
	return false;
}

CUgraph graph_new(void)
{
	CUgraph g = calloc(1, sizeof(*g));

	if (g) {
		g->last = &g->first;
		g->next = graphs;
		graphs = g;
	}
	return g;
}

void graph_free(CUgraph g)
{
	CUgraphNode n, next;
	CUgraphExec e;
	CUgraph *at;

	for (at = &graphs; *at != g; at = &(*at)->next)
		;
	*at = g->next;
	for (e = instances; e; e = e->next)
		if (e->graph == g)
			e->graph = NULL;
	for (n = g->first; n; n = next) {
		next = n->next;
		if (n->place)
			place_drop(n->place);
		if (n->child)
			graph_free(n->child);
		free(n);
	}
	free(g);
}

static CUgraphNode node_new(CUgraph g, CUgraphNodeType type)
{
	CUgraphNode n = calloc(1, sizeof(*n));

	if (n) {
		n->type = type;
		*g->last = n;
		g->last = &n->next;
		g->count++;
	}
	return n;
}

EXPORT CUresult cuGraphCreate(CUgraph *graph, unsigned int flags)
{
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	if (!graph || flags != 0)
		ret = CUDA_ERROR_INVALID_VALUE;
	else if (!(*graph = graph_new()))
		ret = CUDA_ERROR_OUT_OF_MEMORY;
	leave();
	return ret;
}

static CUresult enter_graph(CUgraph graph)
{
	CUresult ret = enter();

	if (ret == CUDA_SUCCESS && !graph_is(graph)) {
		ret = CUDA_ERROR_INVALID_VALUE;
		leave();
	}
	return ret;
}

EXPORT CUresult cuGraphDestroy(CUgraph graph)
{
	CUresult ret = enter_graph(graph);

	if (ret != CUDA_SUCCESS)
		return ret;
	if (graph->owned)
		ret = CUDA_ERROR_INVALID_VALUE;
	else
		graph_free(graph);
	leave();
	return ret;
}

static CUresult add_alloc(CUgraph g, struct device *dev, size_t size, CUgraphNode *out)
{
	struct place *p = place_new(dev, size);
	CUgraphNode n = p ? node_new(g, CU_GRAPH_NODE_TYPE_MEM_ALLOC) : NULL;

	if (!n) {
		if (p)
			place_drop(p);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	n->place = p;
	p->graph = g;
	g->memory = true;
	*out = n;
	return CUDA_SUCCESS;
}

static bool freed_already(CUgraph g, CUdeviceptr dptr)
{
	CUgraphNode n;

	for (n = g->first; n; n = n->next)
		if (n->type == CU_GRAPH_NODE_TYPE_MEM_FREE && n->dptr == dptr)
			return true;
	return false;
}

/* Whether some node allocates at that address. */
static bool allocated(CUdeviceptr dptr)
{
	struct range *r = range_at((uintptr_t)dptr);
	CUgraphNode n;
	CUgraph g;

	if (r && r->kind == RANGE_GRAPH)
		return true;
	for (g = graphs; g; g = g->next)
		for (n = g->first; n; n = n->next)
			if (n->place && n->place->start == (uintptr_t)dptr)
				return true;
	return false;
}

static CUresult add_free(CUgraph g, CUdeviceptr dptr, CUgraphNode *out)
{
	CUgraphNode n;

	if (freed_already(g, dptr) || !allocated(dptr))
		return CUDA_ERROR_INVALID_VALUE;
	n = node_new(g, CU_GRAPH_NODE_TYPE_MEM_FREE);
	if (!n)
		return CUDA_ERROR_OUT_OF_MEMORY;
	n->dptr = dptr;
	g->memory = true;
	*out = n;
	return CUDA_SUCCESS;
}

CUresult graph_capture_alloc(CUgraph g, struct device *dev, size_t size, CUdeviceptr *dptr)
{
	CUgraphNode n;
	CUresult ret = add_alloc(g, dev, size, &n);

	if (ret == CUDA_SUCCESS)
		*dptr = n->place->start;
	return ret;
}

CUresult graph_capture_free(CUgraph g, CUdeviceptr dptr)
{
	CUgraphNode n;

	return add_free(g, dptr, &n);
}

CUresult graph_capture_other(CUgraph g, CUgraphNodeType type)
{
	return node_new(g, type) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

/* ---- nodes, from outside ------------------------------------------------------------------ */

static bool node_in(CUgraph g, CUgraphNode node)
{
	CUgraphNode n;

	for (n = g->first; n; n = n->next)
		if (n == node)
			return true;
	return false;
}

static bool node_is(CUgraphNode node)
{
	CUgraph g;

	for (g = graphs; g; g = g->next)
		if (node_in(g, node))
			return true;
	return false;
}

/* Enters, with a graph that is one and dependencies that are in it. */
static CUresult enter_adding(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, size_t count)
{
	CUresult ret = enter_graph(graph);
	size_t i;

	if (ret != CUDA_SUCCESS)
		return ret;
	if (!node || (count > 0 && !dependencies))
		ret = CUDA_ERROR_INVALID_VALUE;
	for (i = 0; ret == CUDA_SUCCESS && i < count; i++)
		if (!node_in(graph, dependencies[i]))
			ret = CUDA_ERROR_INVALID_VALUE;
	if (ret != CUDA_SUCCESS)
		leave();
	return ret;
}

static CUresult check_alloc(const CUDA_MEM_ALLOC_NODE_PARAMS *params)
{
	size_t i;

	if (!params || params->bytesize == 0 || (params->accessDescCount > 0 && !params->accessDescs))
		return CUDA_ERROR_INVALID_VALUE;
	if (params->poolProps.allocType != CU_MEM_ALLOCATION_TYPE_PINNED || params->poolProps.handleTypes != 0 ||
	    params->poolProps.location.type != CU_MEM_LOCATION_TYPE_DEVICE)
		return CUDA_ERROR_NOT_SUPPORTED;
	for (i = 0; i < params->accessDescCount; i++)
		if (params->accessDescs[i].location.type == CU_MEM_LOCATION_TYPE_DEVICE && !device_at(params->accessDescs[i].location.id))
			return CUDA_ERROR_INVALID_DEVICE;
	return device_at(params->poolProps.location.id) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

static CUresult add_alloc_params(CUgraph graph, CUDA_MEM_ALLOC_NODE_PARAMS *params, CUgraphNode *node)
{
	CUresult ret = check_alloc(params);

	if (ret == CUDA_SUCCESS)
		ret = add_alloc(graph, device_at(params->poolProps.location.id), params->bytesize, node);
	if (ret == CUDA_SUCCESS) {
		params->dptr = (*node)->place->start;
		(*node)->params = *params;
	}
	return ret;
}

EXPORT CUresult cuGraphAddMemAllocNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, size_t count,
				       CUDA_MEM_ALLOC_NODE_PARAMS *params)
{
	CUresult ret = enter_adding(node, graph, dependencies, count);

	if (ret != CUDA_SUCCESS)
		return ret;
	ret = add_alloc_params(graph, params, node);
	leave();
	return ret;
}

EXPORT CUresult cuGraphMemAllocNodeGetParams(CUgraphNode node, CUDA_MEM_ALLOC_NODE_PARAMS *params)
{
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	if (!params || !node_is(node) || node->type != CU_GRAPH_NODE_TYPE_MEM_ALLOC) {
		ret = CUDA_ERROR_INVALID_VALUE;
	} else {
		*params = node->params;
		params->bytesize = node->place->asked;
		params->dptr = node->place->start;
		params->poolProps.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
		params->poolProps.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
		params->poolProps.location.id = node->place->dev->ordinal;
	}
	leave();
	return ret;
}

EXPORT CUresult cuGraphAddMemFreeNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, size_t count, CUdeviceptr dptr)
{
	CUresult ret = enter_adding(node, graph, dependencies, count);

	if (ret != CUDA_SUCCESS)
		return ret;
	ret = add_free(graph, dptr, node);
	leave();
	return ret;
}

EXPORT CUresult cuGraphMemFreeNodeGetParams(CUgraphNode node, CUdeviceptr *dptr)
{
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	if (!dptr || !node_is(node) || node->type != CU_GRAPH_NODE_TYPE_MEM_FREE)
		ret = CUDA_ERROR_INVALID_VALUE;
	else
		*dptr = node->dptr;
	leave();
	return ret;
}

/* A copy; NULL: no memory. Graphs that allocate or free are not copied. */
static CUgraph copy(CUgraph from)
{
	CUgraph to = graph_new();
	CUgraphNode n, c;

	for (n = from->first; to && n; n = n->next) {
		c = node_new(to, n->type);
		if (c && n->child) {
			c->child = copy(n->child);
			if (c->child)
				c->child->owned = true;
		}
		if (!c || (n->child && !c->child)) {
			graph_free(to);
			return NULL;
		}
	}
	return to;
}

static CUresult add_child(CUgraph graph, CUgraph child, CUgraphNode *node)
{
	CUgraphNode n;

	if (!graph_is(child) || child == graph || child->memory)
		return CUDA_ERROR_INVALID_VALUE;
	n = node_new(graph, CU_GRAPH_NODE_TYPE_GRAPH);
	if (!n)
		return CUDA_ERROR_OUT_OF_MEMORY;
	n->child = copy(child);
	if (!n->child)
		return CUDA_ERROR_OUT_OF_MEMORY; /* the node stays, and does nothing */
	n->child->owned = true;
	*node = n;
	return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphAddChildGraphNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, size_t count, CUgraph child)
{
	CUresult ret = enter_adding(node, graph, dependencies, count);

	if (ret != CUDA_SUCCESS)
		return ret;
	ret = add_child(graph, child, node);
	leave();
	return ret;
}

/* A node that neither allocates nor frees. `params` are needed but not looked at. */
static CUresult add_other(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, size_t count, CUgraphNodeType type,
			  const void *params)
{
	CUgraphNode n;
	CUresult ret = enter_adding(node, graph, dependencies, count);

	if (ret != CUDA_SUCCESS)
		return ret;
	n = params ? node_new(graph, type) : NULL;
	if (!params)
		ret = CUDA_ERROR_INVALID_VALUE;
	else if (!n)
		ret = CUDA_ERROR_OUT_OF_MEMORY;
	else
		*node = n;
	leave();
	return ret;
}

EXPORT CUresult cuGraphAddKernelNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, size_t count,
				     const CUDA_KERNEL_NODE_PARAMS_v1 *params)
{
	return add_other(node, graph, dependencies, count, CU_GRAPH_NODE_TYPE_KERNEL, params);
}

EXPORT CUresult cuGraphAddKernelNode_v2(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, size_t count,
					const CUDA_KERNEL_NODE_PARAMS *params)
{
	return add_other(node, graph, dependencies, count, CU_GRAPH_NODE_TYPE_KERNEL, params);
}

EXPORT CUresult cuGraphAddMemcpyNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, size_t count,
				     const CUDA_MEMCPY3D *params, CUcontext ctx)
{
	(void)ctx;
	return add_other(node, graph, dependencies, count, CU_GRAPH_NODE_TYPE_MEMCPY, params);
}

EXPORT CUresult cuGraphAddMemsetNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, size_t count,
				     const CUDA_MEMSET_NODE_PARAMS *params, CUcontext ctx)
{
	(void)ctx;
	return add_other(node, graph, dependencies, count, CU_GRAPH_NODE_TYPE_MEMSET, params);
}

EXPORT CUresult cuGraphAddHostNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, size_t count,
				   const CUDA_HOST_NODE_PARAMS *params)
{
	return add_other(node, graph, dependencies, count, CU_GRAPH_NODE_TYPE_HOST, params);
}

EXPORT CUresult cuGraphAddEmptyNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, size_t count)
{
	return add_other(node, graph, dependencies, count, CU_GRAPH_NODE_TYPE_EMPTY, graph);
}

static CUresult add_node(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, size_t count, CUgraphNodeParams *params)
{
	CUresult ret;

	if (!params)
		return CUDA_ERROR_INVALID_VALUE;
	switch (params->type) {
	case CU_GRAPH_NODE_TYPE_MEM_ALLOC:
		ret = enter_adding(node, graph, dependencies, count);
		if (ret != CUDA_SUCCESS)
			return ret;
		/* Both forms of the structure have one layout. */
		ret = add_alloc_params(graph, (CUDA_MEM_ALLOC_NODE_PARAMS *)&params->alloc, node);
		leave();
		return ret;
	case CU_GRAPH_NODE_TYPE_MEM_FREE:
		return cuGraphAddMemFreeNode(node, graph, dependencies, count, params->free.dptr);
	case CU_GRAPH_NODE_TYPE_GRAPH:
		return cuGraphAddChildGraphNode(node, graph, dependencies, count, params->graph.graph);
	case CU_GRAPH_NODE_TYPE_KERNEL:
	case CU_GRAPH_NODE_TYPE_MEMCPY:
	case CU_GRAPH_NODE_TYPE_MEMSET:
	case CU_GRAPH_NODE_TYPE_HOST:
	case CU_GRAPH_NODE_TYPE_EMPTY:
		return add_other(node, graph, dependencies, count, params->type, params);
	default:
		return CUDA_ERROR_NOT_SUPPORTED;
	}
}

EXPORT CUresult cuGraphAddNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, size_t count, CUgraphNodeParams *params)
{
	return add_node(node, graph, dependencies, count, params);
}

EXPORT CUresult cuGraphAddNode_v2(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, const CUgraphEdgeData *edges, size_t count,
				  CUgraphNodeParams *params)
{
	(void)edges; /* how nodes wait for one another does not matter here */
	return add_node(node, graph, dependencies, count, params);
}

EXPORT CUresult cuGraphAddNode_v3(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, const CUgraphEdgeData *edges, size_t count,
				  CUgraphNodeParams *params)
{
	return cuGraphAddNode_v2(node, graph, dependencies, edges, count, params);
}

EXPORT CUresult cuGraphNodeGetType(CUgraphNode node, CUgraphNodeType *type)
{
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	if (!type || !node_is(node))
		ret = CUDA_ERROR_INVALID_VALUE;
	else
		*type = node->type;
	leave();
	return ret;
}

EXPORT CUresult cuGraphGetNodes(CUgraph graph, CUgraphNode *nodes, size_t *count)
{
	CUgraphNode n;
	size_t i = 0;
	CUresult ret = enter_graph(graph);

	if (ret != CUDA_SUCCESS)
		return ret;
	if (!count) {
		ret = CUDA_ERROR_INVALID_VALUE;
	} else if (!nodes) {
		*count = graph->count;
	} else {
		for (n = graph->first; n && i < *count; n = n->next)
			nodes[i++] = n;
		for (; i < *count; i++)
			nodes[i] = NULL;
		if (*count > graph->count)
			*count = graph->count;
	}
	leave();
	return ret;
}

EXPORT CUresult cuGraphClone(CUgraph *out, CUgraph graph)
{
	CUresult ret = enter_graph(graph);

	if (ret != CUDA_SUCCESS)
		return ret;
	if (!out || graph->memory)
		ret = CUDA_ERROR_INVALID_VALUE;
	else if (!(*out = copy(graph)))
		ret = CUDA_ERROR_OUT_OF_MEMORY;
	leave();
	return ret;
}

/* ---- instances ---------------------------------------------------------------------------- */

static size_t steps_in(CUgraph g)
{
	CUgraphNode n;
	size_t count = 0;

	for (n = g->first; n; n = n->next)
		count += n->child ? steps_in(n->child) : 1;
	return count;
}

static void fill_steps(CUgraph g, struct step *steps, size_t *i)
{
	CUgraphNode n;

	for (n = g->first; n; n = n->next) {
		if (n->child) {
			fill_steps(n->child, steps, i);
			continue;
		}
		steps[*i].type = n->type;
		steps[*i].place = n->place;
		steps[*i].dptr = n->dptr;
		if (n->place)
			n->place->holders++;
		(*i)++;
	}
}

static void drop_instance(CUgraphExec e)
{
	CUgraphExec *at;
	size_t i;

	for (at = &instances; *at && *at != e; at = &(*at)->next)
		;
	if (*at)
		*at = e->next;
	for (i = 0; i < e->count; i++)
		if (e->steps[i].place)
			place_drop(e->steps[i].place);
	if (e->graph)
		e->graph->instances--;
	free(e->steps);
	free(e);
}

static CUresult reserve(CUgraphExec e);

static CUresult instantiate(CUgraphExec *out, CUgraph graph, unsigned long long flags)
{
	CUgraphExec e = NULL;
	size_t count = 0;
	CUresult ret = enter_graph(graph);

	if (ret != CUDA_SUCCESS)
		return ret;
	if (!out || flags > 15 || (graph->memory && graph->instances > 0))
		ret = CUDA_ERROR_INVALID_VALUE;
	if (ret == CUDA_SUCCESS) {
		e = calloc(1, sizeof(*e));
		if (e)
			e->steps = calloc(steps_in(graph) + 1, sizeof(*e->steps));
		if (!e || !e->steps) {
			free(e);
			e = NULL;
			ret = CUDA_ERROR_OUT_OF_MEMORY;
		}
	}
	if (e) {
		fill_steps(graph, e->steps, &count);
		e->count = count;
		e->graph = graph;
		e->memory = graph->memory;
		e->auto_free = flags & CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
		graph->instances++;
		e->next = instances;
		instances = e;
		if (flags & CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD)
			ret = reserve(e);
		if (ret == CUDA_SUCCESS)
			*out = e;
		else
			drop_instance(e);
	}
	leave();
	return ret;
}

static CUresult first_instantiate(CUgraphExec *out, CUgraph graph, CUgraphNode *error, char *log, size_t size)
{
	CUresult ret = instantiate(out, graph, 0);

	if (error)
		*error = NULL;
	if (log && size > 0)
		log[0] = 0;
	return ret;
}

EXPORT CUresult cuGraphInstantiate(CUgraphExec *out, CUgraph graph, CUgraphNode *error, char *log, size_t size)
{
	return first_instantiate(out, graph, error, log, size);
}

EXPORT CUresult cuGraphInstantiate_v2(CUgraphExec *out, CUgraph graph, CUgraphNode *error, char *log, size_t size)
{
	return first_instantiate(out, graph, error, log, size);
}

EXPORT CUresult cuGraphInstantiateWithFlags(CUgraphExec *out, CUgraph graph, unsigned long long flags)
{
	return instantiate(out, graph, flags);
}

EXPORT CUresult cuGraphInstantiateWithParams(CUgraphExec *out, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *params)
{
	CUresult ret = params ? instantiate(out, graph, params->flags) : CUDA_ERROR_INVALID_VALUE;

	if (params) {
		params->hErrNode_out = NULL;
		params->result_out = ret == CUDA_SUCCESS ? 0 : 1;
	}
	return ret;
}

EXPORT CUresult cuGraphInstantiateWithParams_ptsz(CUgraphExec *out, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *params)
{
	return cuGraphInstantiateWithParams(out, graph, params);
}

static CUresult enter_instance(CUgraphExec exec)
{
	CUgraphExec e;
	CUresult ret = enter();

	if (ret != CUDA_SUCCESS)
		return ret;
	for (e = instances; e && e != exec; e = e->next)
		;
	if (!e) {
		ret = CUDA_ERROR_INVALID_VALUE;
		leave();
	}
	return ret;
}

EXPORT CUresult cuGraphExecDestroy(CUgraphExec exec)
{
	CUresult ret = enter_instance(exec);

	if (ret != CUDA_SUCCESS)
		return ret;
	drop_instance(exec); /* what it left allocated lives on */
	leave();
	return CUDA_SUCCESS;
}

static bool lives(const struct step *s)
{
	return s->place && s->place->block;
}

/* Runs the steps. What was taken is given back if one fails. */
static CUresult run(CUgraphExec e)
{
	CUresult ret = CUDA_SUCCESS;
	struct range *r;
	size_t i, done;

	for (i = 0; i < e->count; i++) {
		if (!lives(&e->steps[i]))
			continue;
		if (!e->auto_free)
			return CUDA_ERROR_INVALID_VALUE; /* what the last launch allocated is not freed yet */
		(void)release(range_at(e->steps[i].place->start)); /* always succeeds */
	}
	for (i = 0; i < e->count && ret == CUDA_SUCCESS; i++) {
		if (e->steps[i].type == CU_GRAPH_NODE_TYPE_MEM_ALLOC) {
			ret = place_live(e->steps[i].place);
		} else if (e->steps[i].type == CU_GRAPH_NODE_TYPE_MEM_FREE) {
			r = range_at((uintptr_t)e->steps[i].dptr);
			if (r && r->kind == RANGE_GRAPH)
				ret = release(r);
			else
				ret = CUDA_ERROR_INVALID_VALUE; /* it is not allocated */
		}
	}
	for (done = i, i = 0; ret != CUDA_SUCCESS && i < done; i++)
		if (lives(&e->steps[i]))
			(void)release(range_at(e->steps[i].place->start)); /* as above */
	return ret;
}

/* What one node of the instance frees the next may have. */
static void leave_own(CUgraphExec e, CUdeviceptr dptr)
{
	size_t i;

	for (i = 0; i < e->count; i++) {
		if (lives(&e->steps[i]) && e->steps[i].place->start == (uintptr_t)dptr) {
			leave_block(e->steps[i].place->dev, e->steps[i].place->block);
			e->steps[i].place->block = NULL;
		}
	}
}

/* Takes the memory that a launch will need, and leaves it with the device's blocks. */
static CUresult reserve(CUgraphExec e)
{
	CUresult ret = CUDA_SUCCESS;
	size_t i;

	for (i = 0; i < e->count; i++)
		if (lives(&e->steps[i]))
			return CUDA_SUCCESS; /* it has it */
	for (i = 0; i < e->count && ret == CUDA_SUCCESS; i++) {
		if (e->steps[i].type == CU_GRAPH_NODE_TYPE_MEM_ALLOC)
			ret = take_block(e->steps[i].place->dev, e->steps[i].place->size, &e->steps[i].place->block);
		else if (e->steps[i].type == CU_GRAPH_NODE_TYPE_MEM_FREE)
			leave_own(e, e->steps[i].dptr);
	}
	for (i = 0; i < e->count; i++) {
		if (lives(&e->steps[i])) {
			leave_block(e->steps[i].place->dev, e->steps[i].place->block);
			e->steps[i].place->block = NULL;
		}
	}
	return ret;
}

EXPORT CUresult cuGraphUpload(CUgraphExec exec, CUstream stream)
{
	CUcontext ctx;
	CUresult ret = enter_instance(exec);

	if (ret != CUDA_SUCCESS)
		return ret;
	ret = stream_context(stream, &ctx);
	if (ret == CUDA_SUCCESS)
		ret = reserve(exec);
	leave();
	return ret;
}

EXPORT CUresult cuGraphUpload_ptsz(CUgraphExec exec, CUstream stream)
{
	return cuGraphUpload(exec, per_thread(stream));
}

EXPORT CUresult cuGraphLaunch(CUgraphExec exec, CUstream stream)
{
	CUcontext ctx;
	CUresult ret = enter_instance(exec);

	if (ret != CUDA_SUCCESS)
		return ret;
	ret = stream_context(stream, &ctx);
	if (ret == CUDA_SUCCESS && capturing(stream))
		ret = exec->memory ? capture_fail(stream) : graph_capture_other(capturing(stream), CU_GRAPH_NODE_TYPE_EMPTY);
	else if (ret == CUDA_SUCCESS)
		ret = run(exec);
	leave();
	return ret;
}

EXPORT CUresult cuGraphLaunch_ptsz(CUgraphExec exec, CUstream stream)
{
	return cuGraphLaunch(exec, per_thread(stream));
}

/* Which parameters nodes have does not matter here: only whether the shape is the same. */
static CUresult update(CUgraphExec exec, CUgraph graph, CUgraphExecUpdateResult *result)
{
	struct step *steps;
	size_t count = 0, i;
	CUresult ret = enter_instance(exec);

	if (ret != CUDA_SUCCESS)
		return ret;
	if (!graph_is(graph)) {
		leave();
		return CUDA_ERROR_INVALID_VALUE;
	}
	*result = 0;
	if (exec->memory || graph->memory)
		*result = 6; /* not supported */
	else if (steps_in(graph) != exec->count)
		*result = 2; /* another topology */
	steps = *result == 0 ? calloc(exec->count + 1, sizeof(*steps)) : NULL;
	if (steps) {
		fill_steps(graph, steps, &count);
		for (i = 0; i < count; i++)
			if (steps[i].type != exec->steps[i].type)
				*result = 3; /* a node of another type */
		free(steps);
	}
	leave();
	return *result == 0 ? CUDA_SUCCESS : CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE;
}

EXPORT CUresult cuGraphExecUpdate(CUgraphExec exec, CUgraph graph, CUgraphNode *error, CUgraphExecUpdateResult *result)
{
	CUgraphExecUpdateResult r = 1;
	CUresult ret = update(exec, graph, &r);

	if (error)
		*error = NULL;
	if (result)
		*result = r;
	return ret;
}

EXPORT CUresult cuGraphExecUpdate_v2(CUgraphExec exec, CUgraph graph, CUgraphExecUpdateResultInfo *info)
{
	CUgraphExecUpdateResult r = 1;
	CUresult ret = update(exec, graph, &r);

	if (info) {
		memset(info, 0, sizeof(*info));
		info->result = r;
	}
	return ret;
}
