// SPDX-License-Identifier: Apache-2.0

package main

import (
	"sync"

	"github.com/gpufence/gpufence/enforcer/gpu"
	"github.com/gpufence/gpufence/hook/cdi"
)

// library is NVML wherever the driver lies at the time: the GPU operator brings it after us, and
// again with each upgrade.
type library struct {
	find func() string // a path, "" for the loader's libnvidia-ml.so.1
	open func(path string) gpu.Library

	mu  sync.Mutex
	now gpu.Library
}

// openLibrary is the library that is configured, or the driver's.
func openLibrary(configured string) gpu.Library {
	if configured != "" {
		return gpu.Open(configured)
	}
	return &library{find: nvmlPath, open: func(path string) gpu.Library { return gpu.Open(path) }}
}

// nvmlPath is NVML of a driver that is not the host's own, which the loader finds.
func nvmlPath() string {
	root, err := cdi.FindRoot("/")
	if err != nil || root.By == "host" {
		return ""
	}
	return root.NVML
}

func (l *library) current() gpu.Library {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.now == nil {
		l.now = l.open(l.find())
	}
	return l.now
}

// Init implements [gpu.Library]: it looks for the driver anew.
func (l *library) Init() error {
	fresh := l.open(l.find())
	if err := fresh.Init(); err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.now = fresh
	return nil
}

// Shutdown implements [gpu.Library].
func (l *library) Shutdown() error { return l.current().Shutdown() }

// Driver implements [gpu.Library].
func (l *library) Driver() (string, error) { return l.current().Driver() }

// Devices implements [gpu.Library].
func (l *library) Devices() ([]gpu.Device, error) { return l.current().Devices() }
