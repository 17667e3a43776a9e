//go:build tools

// Package tools names the program that the test bed builds from this module.
package tools

import _ "sigs.k8s.io/kueue/cmd/kueue"
