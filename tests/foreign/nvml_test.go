// SPDX-License-Identifier: Apache-2.0

package foreign

import (
	"strconv"
	"testing"

	"github.com/gpufence/gpufence/tests/node"
)

// seen is what a client of NVML says of a GPU.
type seen struct {
	Total     uint64            `json:"total"`
	Used      uint64            `json:"used"`
	Free      uint64            `json:"free"`
	TotalV2   uint64            `json:"total_v2"`
	Processes map[string]uint64 `json:"processes"`
	Count     int               `json:"count"`
	Fan       string            `json:"nvmlDeviceGetFanSpeed"`
	Power     string            `json:"nvmlDeviceGetEnforcedPowerLimit"`
	Encoder   string            `json:"nvmlDeviceGetEncoderUtilization"`
}

// nvmlClients are the clients, with the versions of requirements/nvml.txt.
var nvmlClients = map[string]string{"nvidia-ml-py": "nvidia-ml-py 13.615.71", "nvitop": "nvitop 1.7.2", "gpustat": "gpustat 1.1.1"}

// TestClientsOfNVML: outside they see the GPU as it is, with all its processes; in a fenced container the
// grant as the GPU, and what the container holds of it.
func TestClientsOfNVML(t *testing.T) {
	t.Parallel()
	p := newPlace(t, "12.8")
	ctx := t.Context()
	other, err := p.node.Outside(ctx, "other")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := other.Kill(); err != nil {
			t.Error(err)
		}
	})
	own, err := p.c.Exec(ctx, true)
	if err != nil {
		t.Fatal(err)
	}
	const othersBytes, ownBytes = 300 * mib, 200 * mib
	for process, bytes := range map[*node.Process]uint64{other: othersBytes, own: ownBytes} {
		if _, err := process.Do(ctx, "context", "alloc "+strconv.FormatUint(bytes/mib, 10)); err != nil {
			t.Fatal(err)
		}
	}
	ownRow, othersRow := strconv.Itoa(own.PID), strconv.Itoa(other.PID)
	for _, delivery := range deliveries {
		var all map[string]seen
		if err := p.python(delivery, "nvml", "nvml.py", &all); err != nil {
			t.Errorf("%s: %v", delivery, err)
		}
		for client, name := range nvmlClients {
			t.Run(client+" "+delivery, func(t *testing.T) {
				defer func() { note(name, delivery, verdict(t)) }()
				s, ok := all[client]
				if !ok {
					t.Fatal("it said nothing")
				}
				t.Logf("%+v", s)
				const contexts = 64 * mib
				if delivery == none {
					if s.Total != 8192*mib || s.TotalV2 != s.Total {
						t.Errorf("total %d, %d", s.Total, s.TotalV2)
					}
					if s.Processes[ownRow] != ownBytes+contexts || s.Processes[othersRow] != othersBytes+contexts {
						t.Errorf("processes %v, want %s and %s", s.Processes, ownRow, othersRow)
					}
				} else {
					if s.Total != limit || s.TotalV2 != limit {
						t.Errorf("total %d, %d, want %d", s.Total, s.TotalV2, limit)
					}
					if s.Used != ownBytes+contexts || s.Used+s.Free != limit {
						t.Errorf("used %d, free %d", s.Used, s.Free)
					}
					if s.Processes[ownRow] != ownBytes+contexts || len(s.Processes) != 1 {
						t.Errorf("processes %v, want only %s", s.Processes, ownRow)
					}
				}
				if client != "nvidia-ml-py" {
					return
				}
				for what, word := range map[string]string{"fan": s.Fan, "power": s.Power, "encoder": s.Encoder} {
					if word != "NVMLError_NotSupported" {
						t.Errorf("%s: %s", what, word)
					}
				}
			})
		}
	}
}
