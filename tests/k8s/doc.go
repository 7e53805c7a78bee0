// SPDX-License-Identifier: Apache-2.0

// Package k8s tests gpufence under a real Kubernetes: etcd, the API server with its usual admission and
// RBAC, scheduler, controllers, kubelet and containerd, all built from pinned modules and started in
// folders of their own, beside a simgpud with two GPUs, a gpufenced, and a device plugin that hands out
// replicas. `make test-k8s` runs it.
//
// The steps of TestKubernetes follow each other on one cluster; each is a subtest with pods of its own,
// which it removes. At the end everything is stopped and unmounted, and what was left is a failure.
//
// It needs root, and a machine without a kubelet: that one's folder for device plugins is a constant.
package k8s
