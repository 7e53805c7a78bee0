// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
	"syscall"

	"github.com/sirupsen/logrus"
)

// journaldSocket is where journald takes entries with fields.
const journaldSocket = "/run/systemd/journal/socket"

// maxEntryBytes bounds an entry: a datagram that the socket's buffer surely takes.
const maxEntryBytes = 48 << 10

// toJournal says whether stderr is a stream that journald reads, by the word of systemd.
func toJournal(getenv func(string) string, stderr io.Writer) bool {
	dev, ino, ok := strings.Cut(getenv("JOURNAL_STREAM"), ":")
	f, isFile := stderr.(*os.File)
	if !ok || !isFile {
		return false
	}
	info, err := f.Stat()
	if err != nil {
		return false
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	return ok && strconv.FormatUint(st.Dev, 10) == dev && strconv.FormatUint(st.Ino, 10) == ino
}

// journald sends every log entry, with its fields, to the system's journal. Where that fails, the
// entry goes to the other writer, so that nothing is lost.
type journald struct {
	conn  *net.UnixConn
	other io.Writer
	plain logrus.Formatter
	put   func(func()) // does a write, perhaps later
}

func newJournald(socket string, other io.Writer) (*journald, error) {
	conn, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: socket, Net: "unixgram"})
	if err != nil {
		return nil, fmt.Errorf("open the system's journal: %w", err)
	}
	return &journald{
		conn: conn, other: other, plain: &logrus.TextFormatter{DisableColors: true, DisableTimestamp: true}, put: func(f func()) { f() },
	}, nil
}

// Levels implements [logrus.Hook].
func (*journald) Levels() []logrus.Level { return logrus.AllLevels }

// Fire implements [logrus.Hook].
func (j *journald) Fire(e *logrus.Entry) error {
	line, err := j.plain.Format(e)
	if err != nil {
		return err
	}
	entry := journalEntry(e)
	j.put(func() {
		if _, err := j.conn.Write(entry); err != nil {
			_, _ = j.other.Write(line) // there is nobody left to tell
		}
	})
	return nil
}

// priorities are syslog's.
var priorities = map[logrus.Level]byte{
	logrus.PanicLevel: '0', logrus.FatalLevel: '2', logrus.ErrorLevel: '3', logrus.WarnLevel: '4', logrus.InfoLevel: '6', logrus.DebugLevel: '7', logrus.TraceLevel: '7',
}

// journalEntry is an entry in journald's native form. Our fields are GPUFENCE_..., so that
// `journalctl GPUFENCE_EVENT=kill` finds them.
func journalEntry(e *logrus.Entry) []byte {
	var b bytes.Buffer
	field := func(name, value string) {
		if len(value) > maxEntryBytes/4 {
			value = strings.ToValidUTF8(value[:maxEntryBytes/4], "") + "..."
		}
		if b.Len()+len(name)+len(value)+16 > maxEntryBytes {
			return
		}
		b.WriteString(name)
		if !strings.Contains(value, "\n") {
			b.WriteString("=" + value + "\n")
			return
		}
		b.WriteByte('\n')
		b.Write(binary.LittleEndian.AppendUint64(nil, uint64(len(value))))
		b.WriteString(value + "\n")
	}
	message := e.Message
	if err, ok := e.Data[logrus.ErrorKey]; ok {
		message += ": " + fmt.Sprint(err)
	}
	field("MESSAGE", message)
	field("PRIORITY", string(priorities[e.Level]))
	field("SYSLOG_IDENTIFIER", "gpufenced")
	for k, v := range e.Data {
		field("GPUFENCE_"+fieldName(k), fmt.Sprint(v))
	}
	return b.Bytes()
}

// fieldName keeps what journald takes in a name.
func fieldName(s string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case r >= 'a' && r <= 'z':
			return r - 'a' + 'A'
		case r >= 'A' && r <= 'Z', r >= '0' && r <= '9':
			return r
		}
		return '_'
	}, s)
}
