// SPDX-License-Identifier: Apache-2.0

package oci

import (
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/gpufence/gpufence/enforcer/quota"
)

// runtimeLog writes where engines look for a runtime's last words: the file of --log, in the
// format of --log-format.
type runtimeLog struct {
	path   string
	json   bool
	engine quota.Engine
	stderr io.Writer
	now    func() time.Time
}

// failed reports what ended the command. The line in the log is what `kubectl describe pod`
// shows; the one on stderr is for engines that only read that.
func (l runtimeLog) failed(sentence string) {
	if l.path == "" && l.json {
		fmt.Fprint(l.stderr, l.line("error", sentence))
		return
	}
	l.append("error", sentence)
	fmt.Fprintln(l.stderr, oneLine(sentence))
}

// notice reports what is worth a line and no reason to fail. Podman takes the whole file for
// one JSON value and would lose runc's own error behind a notice, so there it goes to stderr.
func (l runtimeLog) notice(sentence string) {
	if l.path == "" || l.engine == quota.EnginePodman {
		fmt.Fprintln(l.stderr, oneLine(sentence))
		return
	}
	l.append("warning", sentence)
}

func (l runtimeLog) append(level, sentence string) {
	if l.path == "" {
		return
	}
	f, err := os.OpenFile(l.path, os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o644)
	if err == nil {
		defer f.Close()
		_, err = io.WriteString(f, l.line(level, sentence))
	}
	if err != nil {
		fmt.Fprintf(l.stderr, "gpufence: cannot write the log: %v\n", err)
	}
}

// line is one entry as runc's logger writes it.
func (l runtimeLog) line(level, sentence string) string {
	at := l.now().UTC().Format(time.RFC3339)
	sentence = oneLine(sentence)
	if l.json {
		return fmt.Sprintf("{\"level\":%s,\"msg\":%s,\"time\":%s}\n", quote(level), quote(sentence), quote(at))
	}
	return fmt.Sprintf("time=%q level=%s msg=%q\n", at, level, sentence)
}

// oneLine keeps a sentence on its line, whatever a file name or an annotation in it holds.
func oneLine(s string) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f {
			return ' '
		}
		return r
	}, s)
}

// Sentence is an error as a user sees it: "gpufence: E1203 memory.max ...".
func Sentence(err error) string {
	s := err.Error()
	if strings.HasPrefix(s, "gpufence: ") {
		return s
	}
	return "gpufence: " + s
}
