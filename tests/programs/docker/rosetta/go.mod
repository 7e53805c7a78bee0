module github.com/tonistiigi/go-rosetta

go 1.18
