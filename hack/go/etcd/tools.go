//go:build tools

// Package tools names the program that the test bed builds from this module.
package tools

import _ "go.etcd.io/etcd/server/v3"
