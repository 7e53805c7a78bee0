// SPDX-License-Identifier: Apache-2.0
// words.cc: C++ with exceptions through threads, iostreams and a thread-local.
#include <exception>
#include <future>
#include <iostream>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

static thread_local std::string mine = "none";

static std::string word(int n)
{
	mine = "thread " + std::to_string(n);
	if (n % 3 == 0)
		throw std::runtime_error(mine + " throws");
	return mine;
}

int main()
{
	std::vector<std::future<std::string>> all;
	std::map<std::string, int> seen;
	for (int i = 0; i < 6; i++)
		all.push_back(std::async(std::launch::async, word, i));
	for (auto &f : all) {
		try {
			seen[f.get()]++;
		} catch (const std::exception &e) {
			std::cerr << e.what() << '\n';
		}
	}
	for (const auto &[name, count] : seen)
		std::cout << name << ' ' << count << '\n';
	std::cout << mine << '\n';
}
