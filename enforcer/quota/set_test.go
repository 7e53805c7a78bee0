// SPDX-License-Identifier: Apache-2.0

package quota

import (
	"errors"
	"testing"
)

func TestSetOthers(t *testing.T) {
	c, err := ParseSet(map[string]string{"memory.high": "3Gi", "memory.min": "max", "memory.swap.max": uuidA + "=1Gi", "memory.oom.group": "false"})
	if err != nil {
		t.Fatal(err)
	}
	if _, ok, err := c.Max(gpuA(), 0, DefaultPolicy()); ok || err != nil {
		t.Errorf("memory.max was not asked for: %v, %v", ok, err)
	}
	if n, ok, err := c.High(gpuA(), 0); n != 3*gib || !ok || err != nil {
		t.Errorf("high: %d %t %v", n, ok, err)
	}
	if n, ok, err := c.Min(gpuA(), 0, 4*gib); n != 4*gib || !ok || err != nil {
		t.Errorf("min that follows: %d %t %v", n, ok, err)
	}
	if n, ok, err := c.SwapMax(gpuA(), 0); n != gib || !ok || err != nil {
		t.Errorf("swap: %d %t %v", n, ok, err)
	}
	if _, ok, err := c.SwapMax(gpuB(), 1); ok || err != nil {
		t.Errorf("swap of a GPU that is not listed: %t %v", ok, err)
	}
	if group, ok := c.OOMGroup(); group || !ok {
		t.Errorf("group: %t %t", group, ok)
	}
	c, err = ParseSet(map[string]string{"memory.min": "4Gi"})
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := c.Min(gpuA(), 0, 2*gib); !errors.Is(err, CodeMinAboveMax) {
		t.Errorf("above memory.max: %v", err)
	}
	if _, ok := c.OOMGroup(); ok {
		t.Error("memory.oom.group was not asked for")
	}
}
