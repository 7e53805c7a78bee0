// SPDX-License-Identifier: Apache-2.0

package chart

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/gpufence/gpufence/cmd/gpufence/cli"
)

// Every example is what a node takes, without a warning.
func TestExamples(t *testing.T) {
	files, err := filepath.Glob("../../packaging/kubernetes/examples/*.yaml")
	if err != nil || len(files) < 5 {
		t.Fatalf("%d examples, %v", len(files), err)
	}
	for _, file := range files {
		var stdout, stderr bytes.Buffer
		if status := cli.Run(t.Context(), []string{"lint", file}, func(string) string { return "" }, &stdout, &stderr); status != 0 || stdout.Len() > 0 {
			t.Errorf("%s: status %d\n%s%s", file, status, stdout.String(), stderr.String())
		}
	}
}

// The chart may read no file outside of its folder, so it has copies.
func TestCopies(t *testing.T) {
	for copied, of := range map[string]string{"alerts.yaml": "alerts/gpufence.yaml", "dashboard.json": "dashboards/gpufence.json"} {
		got, err := os.ReadFile("../../packaging/helm/gpufence/files/" + copied)
		if err != nil {
			t.Fatal(err)
		}
		want, err := os.ReadFile("../../packaging/" + of)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, want) {
			t.Errorf("files/%s is not packaging/%s any more: copy it", copied, of)
		}
	}
}
