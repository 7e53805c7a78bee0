// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sirupsen/logrus"
)

func TestJournald(t *testing.T) {
	sock := filepath.Join(t.TempDir(), "j")
	l, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: sock, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	var other bytes.Buffer
	j, err := newJournald(sock, &other)
	if err != nil {
		t.Fatal(err)
	}
	log := logrus.New()
	log.SetOutput(nullWriter{})
	log.AddHook(j)
	read := func() string {
		t.Helper()
		if err := l.SetReadDeadline(time.Now().Add(20 * time.Second)); err != nil {
			t.Fatal(err)
		}
		b := make([]byte, 1<<17)
		n, err := l.Read(b)
		if err != nil {
			t.Fatal(err)
		}
		return string(b[:n])
	}
	log.WithFields(logrus.Fields{"event": "kill", "gpu-uuid": "GPU-1", "seq": 7}).WithError(errors.New("gone")).Warn("used too much")
	got := read()
	for _, want := range []string{"MESSAGE=used too much: gone\n", "PRIORITY=4\n", "SYSLOG_IDENTIFIER=gpufenced\n", "GPUFENCE_EVENT=kill\n", "GPUFENCE_GPU_UUID=GPU-1\n", "GPUFENCE_SEQ=7\n"} {
		if !strings.Contains(got, want) {
			t.Errorf("%q lacks %q", got, want)
		}
	}
	// What a container chose cannot make fields of its own.
	log.Info("evil\nPRIORITY=0\n")
	if got := read(); !strings.HasPrefix(got, "MESSAGE\n\x10\x00\x00\x00\x00\x00\x00\x00evil\nPRIORITY=0\n\nPRIORITY=6\n") {
		t.Errorf("a message of two lines: %q", got)
	}
	log.WithField("x", strings.Repeat("y", 1<<20)).Info(strings.Repeat("ä", 1<<20))
	if got := read(); len(got) > maxEntryBytes || !strings.Contains(got, "PRIORITY=6\n") {
		t.Errorf("a long entry has %d bytes", len(got))
	}
	// Without journald nothing is lost.
	l.Close()
	log.Error("on its own")
	if !strings.Contains(other.String(), "on its own") {
		t.Errorf("lost: %q", other.String())
	}
	if _, err := newJournald(sock+"none", &other); err == nil {
		t.Error("opened nothing")
	}
}

type nullWriter struct{}

func (nullWriter) Write(b []byte) (int, error) { return len(b), nil }

func TestToJournal(t *testing.T) {
	f, err := os.Create(filepath.Join(t.TempDir(), "f"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		t.Fatal(err)
	}
	st := info.Sys().(*syscall.Stat_t)
	env := func(v string) func(string) string { return func(string) string { return v } }
	if !toJournal(env(fmt.Sprintf("%d:%d", st.Dev, st.Ino)), f) {
		t.Error("our own stream is not known")
	}
	for _, v := range []string{"", "1", "1:2", fmt.Sprintf("%d:", st.Dev)} {
		if toJournal(env(v), f) {
			t.Errorf("%q counts as ours", v)
		}
	}
	if toJournal(env("1:2"), &bytes.Buffer{}) {
		t.Error("a buffer is no stream")
	}
}
