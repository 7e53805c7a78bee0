// SPDX-License-Identifier: Apache-2.0

package podman

import (
	"encoding/json"
	"errors"
	"io/fs"
	"regexp"
	"testing"

	"github.com/gpufence/gpufence/enforcer/quota"
	"github.com/gpufence/gpufence/packaging/engine"
)

type files map[string]string

func (f files) ReadFile(path string) ([]byte, error) {
	if text, ok := f[path]; ok {
		return []byte(text), nil
	}
	return nil, fs.ErrNotExist
}

func (f files) Glob(string) ([]string, error) { return nil, nil }

func TestHook(t *testing.T) {
	r := engine.Request{Config: DefaultConfig, Handler: "gpufence", Wrapper: "/usr/bin/gpufence-runtime.podman", Hook: "/usr/bin/gpufence-hook"}
	plan, err := Install(files{}, r)
	if err != nil || len(plan.Changes) != 2 || plan.Changes[1].Path != HooksFolder+"/"+HookName {
		t.Fatalf("%+v, %v", plan, err)
	}
	var hook struct {
		Version string
		Hook    struct {
			Path string
			Args []string
		}
		When   struct{ Annotations map[string]string }
		Stages []string
	}
	if err := json.Unmarshal(plan.Changes[1].After, &hook); err != nil {
		t.Fatal(err)
	}
	if hook.Version != "1.0.0" || hook.Hook.Path != r.Hook || len(hook.Stages) != 1 || hook.Stages[0] != "precreate" {
		t.Errorf("the hook is %+v", hook)
	}
	for key := range hook.When.Annotations {
		if ok, err := regexp.MatchString(key, quota.Domain+"memory.max"); err != nil || !ok {
			t.Errorf("%q does not match our annotations: %v", key, err)
		}
	}
	gone, err := Uninstall(files{plan.Changes[0].Path: string(plan.Changes[0].After), plan.Changes[1].Path: string(plan.Changes[1].After)}, r)
	if err != nil || len(gone.Changes) != 2 || gone.Changes[0].After != nil || gone.Changes[1].After != nil {
		t.Errorf("%+v, %v", gone, err)
	}
	if _, err := Install(files{HooksFolder + "/" + HookName: "{}"}, r); !errors.Is(err, quota.CodeEngineTaken) {
		t.Errorf("somebody else's hook: %v", err)
	}
}
