// SPDX-License-Identifier: Apache-2.0

package fence

import (
	"strings"
	"testing"

	"github.com/gpufence/gpufence/enforcer/policy"
	"github.com/gpufence/gpufence/enforcer/quota"
)

type instances map[string]Instance

func (m instances) Instance(_ policy.ContainerID, uuid string) (Instance, bool) {
	i, ok := m[uuid]
	return i, ok
}

func TestMIG(t *testing.T) {
	const whole, part = "GPU-a", "MIG-a"
	limit := func(n uint64) map[string]quota.Limits { return map[string]quota.Limits{part: {Max: n}} }
	for _, tt := range []struct {
		name           string
		uuid           string
		instance       Instance
		pod, container map[string]quota.Limits
		state          State
		say            string
		level          quota.Level
	}{
		{"a GPU", whole, Instance{GPU: whole, Bytes: 8 << 30}, nil, nil, Absent, "not a MIG instance", quota.LevelNone},
		{"no limit", part, Instance{GPU: whole, Bytes: 8 << 30}, nil, nil, Proven, "", quota.LevelHard},
		{"its size", part, Instance{GPU: whole, Bytes: 8 << 30}, limit(8 << 30), nil, Proven, "", quota.LevelHard},
		{"its size, by the container", part, Instance{GPU: whole, Bytes: 8 << 30}, nil, limit(8 << 30), Proven, "", quota.LevelHard},
		{"more than that", part, Instance{GPU: whole, Bytes: 8 << 30}, limit(9 << 30), limit(quota.Unlimited), Proven, "", quota.LevelHard},
		{"below", part, Instance{GPU: whole, Bytes: 8 << 30}, limit(8<<30 - 1), nil, Absent, "below the instance's 8Gi", quota.LevelNone},
		{"below, at the container", part, Instance{GPU: whole, Bytes: 8 << 30}, limit(8 << 30), limit(1 << 30), Absent, "memory.max 1Gi is below", quota.LevelNone},
		{"shared", part, Instance{GPU: whole, Bytes: 8 << 30, Others: []string{"pod/other"}}, limit(8 << 30), nil, Degraded, "shared with pod/other", quota.LevelNone},
		{"NVML does not answer", part, Instance{GPU: whole, Why: "lost"}, limit(8 << 30), nil, Degraded, "lost", quota.LevelNone},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := MIG{instances{part: tt.instance}}
			s := Subject{Grant: quota.Grant{GPUs: []quota.GPU{{UUID: tt.uuid}}, Pod: tt.pod, Container: tt.container}}
			raised, err := f.Raise(t.Context(), s)
			if err != nil || raised[tt.uuid].State != tt.state || !strings.Contains(raised[tt.uuid].Why, tt.say) || (tt.state == Proven) != (raised[tt.uuid].Proof != "") {
				t.Errorf("%+v, %v", raised, err)
			}
			if l := Level([]Fence{f}, s); l != tt.level {
				t.Errorf("level %s", l)
			}
		})
	}
}
